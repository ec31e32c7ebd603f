"""From files of sound to samples and spectrograms; without torch."""
