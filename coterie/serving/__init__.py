"""Server of an exported model: recommendations to callers who bring a vector or a history of their own."""
