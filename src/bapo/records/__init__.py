"""Records of optimizer updates, on disk: RUN/updates."""
