"""Small things that every package uses: sizes in words, module paths, files, progress."""
