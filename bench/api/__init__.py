"""What the API's routes cost beside routes that do nothing."""
