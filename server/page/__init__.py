"""The page at `/`: the files that `server.routes.page` serves to browsers. No build step, nothing from elsewhere."""
