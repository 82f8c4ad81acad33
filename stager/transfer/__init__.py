"""Download and upload engines: ranges, parts, resume, checksums."""
