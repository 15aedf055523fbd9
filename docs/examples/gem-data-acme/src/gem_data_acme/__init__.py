"""Training samples from an SQLite database, as an example of a plug-in."""
