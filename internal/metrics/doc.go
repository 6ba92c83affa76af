// Package metrics shows what the ranks of a job have counted, to Prometheus and what reads its formats. docs/metrics.md lists the
// metrics.
//
// [Handler] shows one rank, [Job] all ranks of a job on one address, and [Serve] puts either on a port. Names of tensors are not
// among the labels: they are without bound, and what a model is made of is nobody's business on an open port.
//
// Invariants:
//
//  1. Nothing is counted here: a scrape reads counters that others keep, in time and memory that do not depend on what has run.
//  2. Who scrapes, however slowly or often, takes bounded memory, bounded connections and no lock of a rank's engine for longer
//     than it takes to copy trace.Stats.
//  3. What a rank says cannot change or hide what another one says, nor what [Job] says of them.
package metrics
