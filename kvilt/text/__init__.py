"""Text and tokens: tokenizers, streaming text, stop strings, chat templates. Knows no tensor and no model."""
