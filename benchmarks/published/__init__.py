"""Published measurements, each predicted from the training code that it was made with."""
