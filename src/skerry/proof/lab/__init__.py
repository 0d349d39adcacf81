"""The laboratory: many learners on one device, driven by the real protocol in virtual time, to study quality."""
