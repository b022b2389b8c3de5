"""`fusequeue mcp`: tools of the Model Context Protocol."""
