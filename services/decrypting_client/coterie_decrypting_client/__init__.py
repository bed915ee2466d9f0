"""The decrypting client: holds the key of encrypted sums with others, and decrypts a part of each sum."""
