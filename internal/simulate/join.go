package simulate

import (
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/rendezvous/rendezvouspb"
)

// Joined is what the join of a job costs.
type Joined struct {
	// CheckIn is the time until rank 0 has accepted all ranks, Gather the time in which the records go round
	// the ring, and Ready the time until all ranks know that every rank is ready.
	CheckIn, Gather, Ready time.Duration
	RootCPU                time.Duration // of rank 0
	Connections            int           // of rank 0
	RootBytes              int64         // that rank 0 sends and receives
	MemberBytes            int64         // that any other rank sends and receives
	RecordBytes            int           // of a record in a frame
}

// Time returns the time of the whole join.
func (j *Joined) Time() time.Duration { return j.CheckIn + j.Gather + j.Ready }

// Join computes the join of a job of more than 128 ranks, which all start at the same time, without TLS. It
// is a model of what internal/rendezvous does: every rank has a connection to the root, to which it sends its
// request and from which it gets the records of its neighbours. Then the records go round the ring in ranks-1
// steps. A ring advances at the mean of the times of its steps, because every rank waits for the previous
// one. At last, the root gets a status of every rank, and answers it. Rank 0 has one core.
func Join(ranks, perHost int, c *Costs) Joined {
	n := time.Duration(ranks)
	record := &rendezvouspb.Record{Addr: "10.128.200.200:43210", Host: "trainer-1234-worker-01234",
		HostId: "0f5c2f6e-6d3b-4c8e-9c39-6a3d5f7f5a11", Pid: 1234567,
		Capabilities: map[string]string{"tcp": "", "shm": "", "mpi": "not built", "nccl": "not built"},
		Memory:       &rendezvouspb.Memory{Uid: 1000, Token: make([]byte, 16), Socket: "/tmp/gohvd-1000/0123456789abcdef/1234567"},
		Processors:   make([]uint64, 3)}
	request := proto.Size(&rendezvouspb.JoinRequest{Job: "job", Token: make([]byte, 16), Nonce: make([]byte, 16),
		Rank: int32(ranks - 1), Size: int64(ranks), Record: record}) + dial.FrameHeaderBytes
	j := Joined{Connections: ranks - 1, RecordBytes: proto.Size(record) + dial.FrameHeaderBytes}
	answer := proto.Size(&rendezvouspb.Answer{Kind: rendezvouspb.Answer_TABLE, Epoch: 1, Ring: true}) +
		dial.FrameHeaderBytes + 2*j.RecordBytes
	status := proto.Size(&rendezvouspb.Status{Kind: rendezvouspb.Status_READY}) + dial.FrameHeaderBytes
	start := proto.Size(&rendezvouspb.Answer{Kind: rendezvouspb.Answer_START}) + dial.FrameHeaderBytes
	own := int64(request + answer + status + start)
	ring := int64(2 * (ranks - 1) * j.RecordBytes)
	j.RootBytes, j.MemberBytes = own*int64(ranks-1)+ring, own+ring

	admit := n * c.Admit
	step := c.Record + (time.Duration(perHost-1)*c.Loopback+c.Latency)/time.Duration(perHost)
	ready := n * 2 * c.Frame
	j.RootCPU = admit + n*c.Record + ready
	j.CheckIn = admit + 3*c.Latency
	j.Gather = (n - 1) * step
	j.Ready = ready + 2*c.Latency
	return j
}
