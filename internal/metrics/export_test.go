package metrics

// ServeOn is like Serve but uses the listener that it is given.
var ServeOn = serveOn
