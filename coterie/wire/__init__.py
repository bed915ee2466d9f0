"""Wire formats: generated stubs (``v1``), tensors as raw bytes, payloads in chunks, refusals."""
