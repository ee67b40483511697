"""Which values a stream reaches, and where it stops."""
