"""Jagged data loading without padding: Parquet source, converters, balanced and resumable batches."""
