"""Sessions: trees of turns whose KV is kept, and found again whatever a client strips or edits."""
