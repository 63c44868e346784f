"""Code that all pictures share: themes, fonts, the sheet they are drawn on, and saving to files."""
