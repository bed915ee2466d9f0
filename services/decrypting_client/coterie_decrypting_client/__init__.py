"""Run a decrypting client, which shares the key of encrypted sums with others and decrypts a part of each sum."""
