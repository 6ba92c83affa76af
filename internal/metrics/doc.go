// Package metrics shows the counters of the ranks of a job to Prometheus and other readers of its formats.
// docs/metrics.md lists the metrics.
//
// [Handler] shows one rank, [Job] all ranks of a job at one address, and [Serve] serves either on a port.
// Names of tensors are not among the labels: their number is unbounded, and an open port should not reveal
// the structure of a model.
//
// Invariants:
//
//  1. This package counts nothing: a scrape reads counters that others keep, in time and memory that do not
//     depend on what has run.
//  2. Scrapes, however slow or frequent, take bounded memory and bounded connections. They hold no lock of a
//     rank's engine for longer than it takes to copy trace.Stats.
//  3. The answer of a rank cannot change or hide the metrics of another rank, nor those that [Job] adds
//     itself.
package metrics
