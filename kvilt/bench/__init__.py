"""What `kvilt bench` and the reports measure. It computes numbers; the command line loads models and prints."""
