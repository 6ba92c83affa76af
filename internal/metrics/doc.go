// Package metrics exports the counters of the ranks of a job to Prometheus and other programs that read its
// formats. docs/metrics.md lists the metrics.
//
// [Handler] serves the metrics of one rank, and [Job] serves the metrics of all ranks of a job at one
// address. [Serve] listens on a port for either of them. Tensor names are not used as labels, because their
// number is unbounded and because an open port should not reveal the structure of a model.
//
// Invariants:
//
//  1. This package counts nothing itself. A scrape reads counters that other packages keep. Its time and
//     memory do not depend on how many operations have run.
//  2. Scrapes use bounded memory and a bounded number of connections, even if they are slow or frequent.
//     They hold a lock of a rank's engine only while they copy trace.Stats.
//  3. Every metric of a rank that [Job] serves has the rank's number and host as labels.
package metrics
