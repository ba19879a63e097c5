"""What every optimizer update saw, on disk: RUN/updates."""
