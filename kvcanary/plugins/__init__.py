"""Entry points that engines load by themselves. Importing one costs nothing; see each for when it does something."""
