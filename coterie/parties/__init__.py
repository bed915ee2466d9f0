"""A party's part in a run: its members of sums, key holding, custody, decryption."""
