"""Define the example job of `paceline demo`: a small BERT, pre-trained on text that every Python installation has."""
