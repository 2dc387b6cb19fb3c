"""Models whose cut or division holds for some values, shapes, masks or flags only, and honest ones that look alike."""
