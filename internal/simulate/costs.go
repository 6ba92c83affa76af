package simulate

import "time"

// Costs holds the CPU time of each kind of work, and the properties of the network.
type Costs struct {
	// Turn is the CPU time of a turn of the loop, Frame of receiving or sending a frame on a connection, and
	// KiB of 1024 bytes of it. Wake is that of parking and of being woken, for each turn that does not follow
	// the last one at once.
	Turn, Frame, KiB, Wake time.Duration

	// Submit is what a member needs for a submitted tensor, GrantBit for one that was granted by its cache
	// bit, GrantFull for one that was granted in full, and Dispatch for a grant.
	Submit, GrantBit, GrantFull, Dispatch time.Duration

	// Forward is what a leader needs for a frame of a rank, HeldVote for a vote in it and HeldAsk for a
	// request in it.
	Forward, HeldVote, HeldAsk time.Duration

	// Part is what the coordinator needs to decode a frame, or a part of a combined frame, and PartAsk for a
	// request in it. Vote is what it needs for a vote in a part, and Led for each rank for which a part with
	// nothing but votes stands, from the frame to the grant. For other parts it needs Step for each rank, and
	// Ask for each request of a rank. If a part stands for all ranks behind a leader, it needs only AskAll
	// for each request of each rank. DecideBit and DecideFull are for a tensor that is granted, and Scan for
	// each rank and process set about which a cycle decides.
	Part, PartAsk, Vote, Led, Step, Ask, AskAll, DecideBit, DecideFull, Scan time.Duration

	// Admit is what rank 0 needs to accept a rank that joins, and Record what a rank needs to pass on a
	// record.
	Admit, Record time.Duration

	Operation         time.Duration // the time of a collective
	Latency, Loopback time.Duration // of a frame between hosts and on one host
	BytesPerSecond    float64       // of the network card of a host
}

// Measured holds costs that were measured with Go 1.26 on 2 shared cores of an AMD EPYC, while other programs
// were running. The benchmarks are:
//
//	C  go test ./internal/simulate -run '^$' -bench Costs -benchtime 10x
//	F  go test ./internal/control -run '^$' -bench Frames -benchtime 500x
//	L  go test ./internal/engine -run '^$' -bench Leaders/ranks=64 -benchtime 60x
//	J  go test ./internal/rendezvous -run '^$' -bench Join -benchtime 3x
//
// C runs the state machines of this simulation, whose CPU time it measures. In the formulas below, n/T/c
// is the CPU time of rank 0 for n ranks, T tensors and a cache of c entries, in microseconds, with a
// connection for each rank, l/T/c the same with leaders for 512 ranks, and m/T/c for 8192 ranks on hosts of
// 128.
//
// PartAsk and Ask were measured when leaders still listed the ranks of equal requests, so 512/161/0 gives
// only their sum now: 64982 / 161 / 512 = 0.79 in a later run, where Measured has 1.07. Wake is 0, because it
// depends on what else the machine does: TestValidation of internal/engine measures it.
//
// Everything for requests and responses in full was measured when package proto encoded them. Since then, the
// state machines of members need 0.4 of the time for uncached tensors, and those of rank 0 and of leaders
// 0.7.
//
// Scan is assumed. Latency, Loopback, BytesPerSecond and Operation are chosen: a data center with 25 Gbit/s.
var Measured = Costs{
	Turn: 2 * time.Microsecond, // C: a member at 8/1/1024 has 2 turns, 3.8
	// F with 20 connections: 7.0 to 9.5 us in, each in a turn of its own, and 7.7 to 10.9 us out
	Frame: 9 * time.Microsecond,
	KiB:   300, // L: copying in and out of the kernel; between 200 and 400 ns

	Submit: 60, GrantBit: 60, // C: a member at 512/161/1024 and 512/1/1024, 28.0 - 8.1 for 160 of both
	GrantFull: 1200, // C: a member at 512/161/0 and 512/1/0, (172.9 - 9.4) / 160 = 1.0, and decoding
	Dispatch:  1000, // C: rest of a member at 512/1/1024

	Forward:  700,  // C: a leader at l/1/1024, 23 for 16 frames in and out, of which half are up
	HeldVote: 84,   // C: a leader at l/161/1024 and l/1/1024, (130.2 - 23.1) / 160 / 8
	HeldAsk:  1600, // C: a leader at l/161/0 and l/1/0, (2125 - 45) / 160 / 8

	Part:       1200, // C: 512/1/1024 and l/1/1024, (901 - 373) / (512 - 71)
	PartAsk:    730,  // C: 512/161/0 and l/161/0, (87963 - 28003) / 161 / 512
	Vote:       50,   // C: l/161/1024 and l/1/1024, (698 - 131) / 160 / 71
	Led:        66,   // C: m/1/1024 and l/1/1024 without 120 parts, (835 - 131 - 120 * 1.7) / (8064 - 504)
	Step:       520,  // C: 512/1/1024 without 512 parts
	Ask:        340,  // C: l/161/0, 28003 / 161 / 512
	AskAll:     75,   // C: l/161/0 and l/1/0 without 71 parts and 8 ranks, (90.4 - 56.1) / 504; again: 91
	DecideBit:  350,  // C: 8/161/1024 and 8/1/1024, (80.3 - 24.0) / 160
	DecideFull: 1500, // C: 8/161/0 and 8/1/0 without 8 requests, (1420 - 26) / 160 - 8 * 0.9
	Scan:       20,   // assumed: controller.decide visits each rank for each set; in Step for one set

	// J/ranks=1024 with -cpuprofile: 962.8 ms of CPU time / 1024 ranks, of which the root's goroutines use 27
	// %
	Admit:  260 * time.Microsecond,
	Record: 9 * time.Microsecond, // J: (83.0 ms - 64 * 2 * 0.38 ms) / 64 / 64, both rounded

	Operation: 200 * time.Microsecond, Latency: 20 * time.Microsecond, Loopback: 5 * time.Microsecond,
	BytesPerSecond: 25e9 / 8,
}
