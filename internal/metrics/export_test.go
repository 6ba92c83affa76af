package metrics

// ServeOn is like Serve, but serves on a given listener and with a given timeout.
var ServeOn = serveOn

// ScrapeTimeout is the timeout of Serve.
const ScrapeTimeout = scrapeTimeout
