"""Stores in a bucket: of S3, of Google Cloud Storage, and of Azure Blob Storage."""
