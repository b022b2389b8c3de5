"""From pixels to objects in storage: image and video encoding, uploads, previews."""
