package metrics

// ServeOn is like Serve, but serves on a given listener and with a given timeout.
var ServeOn = serveOn

// MaxText limits the bytes of a rank's answer.
const MaxText = maxText

// ScrapeTimeout is the timeout of Serve.
const ScrapeTimeout = scrapeTimeout
