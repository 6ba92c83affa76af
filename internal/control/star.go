package control

import (
	"fmt"
	"slices"

	"github.com/gohvd/gohvd/internal/message"
	"github.com/gohvd/gohvd/internal/topo"
)

// StarConfig has what a Star needs.
type StarConfig struct {
	Rank topo.Rank
	Size int
	// Up sends a frame to rank 0, and Down a frame from rank 0 to another rank. They report errors
	// themselves, and keep no reference to the frame.
	Up   func(frame []byte)
	Down func(to topo.Rank, frame []byte)
	// Malformed is called with the sender of a frame that breaks the protocol.
	Malformed func(from topo.Rank, err error)
}

// Star implements the collectives of lock-step over the control connections, with rank 0 in the center
// (engine.Collectives).
type Star struct {
	cfg     StarConfig
	frames  [][][]byte // for each rank, the frames that have arrived and have not been used
	spare   [][]byte   // memory of vectors that were used
	pending collective // the collective that was started last
	and, or []uint64   // the vectors that AndOr combines
	own     []byte     // the frame of this rank
	scratch struct {
		and, or []uint64
		frame   []byte
	}
}

// collective is one of the collectives of a Star.
type collective uint8

const (
	combine collective = iota
	gather
	broadcast
)

// NewStar returns a star on which no collective has started.
func NewStar(cfg StarConfig) *Star { return &Star{cfg: cfg, frames: make([][][]byte, cfg.Size)} }

// Take keeps a copy of a frame that has come from a rank if the frame is part of a collective. Otherwise it
// returns false.
func (s *Star) Take(from topo.Rank, frame []byte) bool {
	ofCycle := byte(message.DownCycle)
	if s.cfg.Rank == 0 {
		ofCycle = byte(message.UpNews)
	}
	if !message.IsVectors(frame) && (len(frame) == 0 || frame[0] != ofCycle) {
		return false
	}
	var kept []byte
	if n := len(s.spare); n > 0 {
		kept, s.spare = s.spare[n-1], s.spare[:n-1]
	}
	s.frames[from] = append(s.frames[from], append(kept, frame...))
	return true
}

// AndOr implements engine.Collectives.
func (s *Star) AndOr(and, or []uint64) {
	s.pending, s.and, s.or = combine, and, or
	if s.cfg.Rank != 0 {
		s.cfg.Up(s.encode())
	}
}

// Gather implements engine.Collectives.
func (s *Star) Gather(frame []byte) {
	s.pending, s.own = gather, frame
	if s.cfg.Rank != 0 {
		s.cfg.Up(frame)
	}
}

// Broadcast implements engine.Collectives.
func (s *Star) Broadcast(frame []byte) {
	s.pending, s.own = broadcast, frame
	if s.cfg.Rank == 0 {
		s.down(frame)
	}
}

func (s *Star) down(frame []byte) {
	for r := 1; r < s.cfg.Size; r++ {
		s.cfg.Down(topo.Rank(r), frame)
	}
}

// Poll returns false, because a frame notifies the loop.
func (s *Star) Poll() bool { return false }

// Missing implements engine.Collectives.
func (s *Star) Missing() (ranks []topo.Rank) {
	for r := range topo.Rank(s.cfg.Size) {
		if s.isMissing(r) {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

// isMissing reports whether the collective waits for a frame from rank r.
func (s *Star) isMissing(r topo.Rank) bool {
	waits := s.pending != broadcast && s.cfg.Rank == 0 && r != 0 ||
		s.pending != gather && s.cfg.Rank != 0 && r == 0
	return waits && len(s.frames[r]) == 0
}

// Test implements engine.Collectives.
func (s *Star) Test() (frames [][]byte, done bool, err error) {
	for r := range topo.Rank(s.cfg.Size) {
		if s.isMissing(r) {
			return nil, false, nil
		}
	}
	root := s.cfg.Rank == 0
	switch s.pending {
	case gather:
		if !root {
			return nil, true, nil
		}
		frames = append(frames, s.own)
		for r := 1; r < s.cfg.Size; r++ {
			frames = append(frames, s.take(topo.Rank(r)))
		}
		return frames, true, nil
	case broadcast:
		if !root {
			s.own = s.take(0)
		}
		return [][]byte{s.own}, true, nil
	}
	if !root {
		ok := s.decode(0)
		copy(s.and, s.scratch.and)
		copy(s.or, s.scratch.or)
		return nil, ok, nil
	}
	for r := 1; r < s.cfg.Size; r++ {
		if !s.decode(topo.Rank(r)) {
			return nil, false, nil
		}
		(*message.Bits)(&s.and).And(s.scratch.and)
		(*message.Bits)(&s.or).Or(s.scratch.or)
	}
	s.down(s.encode())
	return nil, true, nil
}

// take removes and returns the oldest unused frame that came from a rank.
func (s *Star) take(from topo.Rank) []byte {
	frame := s.frames[from][0]
	s.frames[from] = slices.Delete(s.frames[from], 0, 1)
	return frame
}

// encode returns a frame with the bit vectors of this rank. It is valid until the next call.
func (s *Star) encode() []byte {
	s.scratch.frame = message.AppendVectors(s.scratch.frame[:0], s.and, s.or)
	return s.scratch.frame
}

// decode decodes the bit vectors that came from a rank and reports whether they can be combined with the
// vectors of this rank. If not, decode declares that the sender has failed.
func (s *Star) decode(from topo.Rank) bool {
	var err error
	v, frame := &s.scratch, s.take(from)
	defer func() { s.spare = append(s.spare, frame[:0]) }()
	if v.and, v.or, err = message.DecodeVectors(frame, v.and, v.or); err == nil &&
		(len(v.and) != len(s.and) || len(v.or) != len(s.or)) {
		err = fmt.Errorf("got an AND vector of %d words and an OR vector of %d words, want %d and %d words",
			len(v.and), len(v.or), len(s.and), len(s.or))
	}
	if err != nil {
		s.cfg.Malformed(from, err)
	}
	return err == nil
}
