package metrics

// ServeOn is Serve on a listener of the test.
var ServeOn = serveOn
