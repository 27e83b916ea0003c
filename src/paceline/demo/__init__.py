"""The main job: a small BERT, pre-trained on text that every Python has."""
