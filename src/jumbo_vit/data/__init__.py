"""What enters: pictures, folders, tables. Nothing here imports torch."""
