package metrics

// ServeOn serves like Serve, on a given listener.
var ServeOn = serveOn
