"""safetensors files to devices, and back."""
