"""Another implementation of gdpa, as an example of a plug-in."""
