"""Video: from files, URLs and objects of Python to frames that can be read, and the choice of frames."""
