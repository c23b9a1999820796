"""What everything else stands on: settings that check themselves, trees by path, and the mesh."""
