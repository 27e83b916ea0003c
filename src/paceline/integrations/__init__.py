"""Train what was written for other libraries: each module takes the objects of one of them."""
