"""What a program takes, predicted, and the pipelines chosen by it."""
