package metrics

// ServeOn is like Serve, but serves on a given listener.
var ServeOn = serveOn
