package rendezvous

import (
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/rendezvous/rendezvouspb"
	"github.com/gohvd/gohvd/internal/topo"
)

// In the root protocol, a rank sends one JoinRequest after the greetings and gets one Answer. If that Answer
// is a table, messages with the records come next. The rank then sends Statuses and gets further Answers.
// These are results of Agree and, as the last Answer, the result of the start, which says that all ranks are
// ready, or which ranks have failed. Each message is a protobuf in a frame.
const (
	rootMagic   = "GHVB"
	rootVersion = 10

	tokenBytes = 16

	// The following bounds include 256 bytes for the field headers and numbers of a message.
	maxRecordBytes      = 7*MaxNameBytes + 2*MaxCapabilitiesBytes + MaxProcessors/8 + 256
	maxTermsBytes       = 2 * MaxTermsBytes // includes field headers
	maxJoinRequestBytes = maxRecordBytes + MaxNameBytes + 2*tokenBytes + maxTermsBytes + 256
	maxTextBytes        = 8 << 10
	// maxAnswerBytes bounds answers of kind TRIED, which are the longest. They have a rank without a text for
	// each other host. A host on which a try can fail has at least two ranks.
	maxAnswerBytes = maxTriedRanks*(maxTriedBytes+16) + MaxSize/2*10 + 256
	maxStatusBytes = maxTextBytes + 256
	maxNamedRanks  = 1000 // maximum number of ranks that an answer names
)

// answerTimeout is the time limit for sending a request or an answer.
const answerTimeout = 5 * time.Second

// newToken returns tokenBytes random bytes.
func newToken() []byte {
	token := make([]byte, tokenBytes)
	rand.Read(token) // rand.Read never fails
	return token
}

func appendMessage(frames []byte, m proto.Message) ([]byte, error) {
	f, err := proto.MarshalOptions{}.MarshalAppend(dial.NewFrame(proto.Size(m)), m)
	if err != nil {
		return nil, err
	}
	return append(frames, dial.SealFrame(f)...), nil
}

func recordToProto(r *Record) *rendezvouspb.Record {
	return &rendezvouspb.Record{
		Addr: r.Addr, Host: r.Host, HostId: r.HostID, Pid: int64(r.PID), Capabilities: r.Capabilities,
		Memory: &rendezvouspb.Memory{Uid: r.Memory.UID, Token: r.Memory.Token, Socket: r.Memory.Socket,
			Reason: r.Memory.Reason},
		Device: r.Device, SharesDevice: r.SharesDevice,
		Processors: r.Processors,
	}
}

func recordFromProto(m *rendezvouspb.Record) (Record, error) {
	shared := m.GetMemory()
	r := Record{
		Addr: m.GetAddr(), Host: m.GetHost(), HostID: m.GetHostId(), PID: int(m.GetPid()),
		Capabilities: m.GetCapabilities(),
		Memory:       Memory{shared.GetUid(), shared.GetToken(), shared.GetSocket(), shared.GetReason()},
		Device:       m.GetDevice(), SharesDevice: m.GetSharesDevice(),
		Processors: m.GetProcessors(),
	}
	return r, r.check()
}

func decodeRecord(body []byte) (Record, error) {
	var m rendezvouspb.Record
	if err := proto.Unmarshal(body, &m); err != nil {
		return Record{}, err
	}
	return recordFromProto(&m)
}

// decodeRoot decodes and checks the value of the root key.
func decodeRoot(value []byte) (*rendezvouspb.Root, error) {
	var m rendezvouspb.Root
	if err := proto.Unmarshal(value, &m); err != nil {
		return nil, fmt.Errorf("rank 0's entry in the store is malformed: %w", err)
	}
	if len(m.GetToken()) != tokenBytes {
		return nil, fmt.Errorf("rank 0's entry in the store is malformed: the token has %d bytes, want %d", len(m.GetToken()), tokenBytes)
	}
	if _, _, err := net.SplitHostPort(m.GetAddr()); err != nil {
		return nil, fmt.Errorf("rank 0's entry in the store is malformed: %w", err)
	}
	return &m, nil
}

// joinRequest is a decoded JoinRequest. All its fields have been checked except rank and size, which may be
// any numbers.
type joinRequest struct {
	*rendezvouspb.JoinRequest
	record Record
}

func decodeJoinRequest(body []byte) (*joinRequest, error) {
	q := &joinRequest{JoinRequest: new(rendezvouspb.JoinRequest)}
	if err := proto.Unmarshal(body, q.JoinRequest); err != nil {
		return nil, err
	}
	if len(q.GetToken()) != tokenBytes || len(q.GetNonce()) != tokenBytes {
		return nil, fmt.Errorf("the token has %d bytes and the nonce has %d bytes, want %d bytes each", len(q.GetToken()),
			len(q.GetNonce()), tokenBytes)
	}
	if q.GetLastEpoch() > maxEpoch {
		return nil, fmt.Errorf("the last epoch is %d, want at most %d", q.GetLastEpoch(), uint64(maxEpoch))
	}
	if err := checkName("job", q.GetJob()); err != nil {
		return nil, err
	}
	var err error
	q.record, err = recordFromProto(q.GetRecord())
	return q, err
}

func refusalAnswer(e *RefusedError) *rendezvouspb.Answer {
	return &rendezvouspb.Answer{Kind: rendezvouspb.Answer_REFUSED, Reason: uint32(e.Reason),
		Text: cut(e.Text, maxTextBytes), Ranks: encodeRanks(e.Awaited)}
}

// encodeRanks returns the numbers of ranks for an answer, at most maxNamedRanks of them.
func encodeRanks(ranks []topo.Rank) (numbers []int32) {
	for _, r := range ranks[:min(len(ranks), maxNamedRanks)] {
		numbers = append(numbers, int32(r))
	}
	return numbers
}

func decodeRanks(numbers []int32) (ranks []topo.Rank) {
	for _, n := range numbers {
		ranks = append(ranks, topo.Rank(n))
	}
	return ranks
}

// cut shortens text so that it fits into a message: the parameter most is the maximum number of bytes of the
// result.
func cut(text string, most int) string {
	text = strings.ToValidUTF8(text, "?")
	return strings.ToValidUTF8(text[:min(len(text), most)], "") // the cut may have split a character
}

// errStale reports that a root has refused this rank with the answer STALE. For the other answers with which
// a root refuses a rank, the errors are *completeError and *RefusedError.
var errStale = errors.New(
	"the root of rank 0 at this address is not the root in the store (it may belong to an earlier attempt), " +
		"or it has already answered this process")

type completeError struct{ epoch uint64 }

func (e *completeError) Error() string { return fmt.Sprintf("epoch %d is complete", e.epoch) }
