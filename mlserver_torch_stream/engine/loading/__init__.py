"""From files to a checked model, shared by all who name it, on the devices and cores that there are."""
