package shm

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net"
	"slices"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/topo"
)

const (
	magic      = 0x67687368 // "ghsh"
	version    = 4
	helloBytes = 4 + 4 + 4
	// maxPacketBytes is larger than the longest packet of a handshake.
	maxPacketBytes = 256
)

// encodeHello encodes the hello, which the dialer of a Unix connection sends first. It contains the rank of
// the dialer:
//
//	magic u32 | version u32 | rank u32      (little-endian)
//
// After the hello, both ends prove that they know the tokens of both ranks (package secret). Only the
// rendezvous has distributed these tokens. The proof is valid only for these two ranks in this epoch of this
// job.
func encodeHello(from topo.Rank) []byte {
	b := binary.LittleEndian.AppendUint32(make([]byte, 0, helloBytes), magic)
	b = binary.LittleEndian.AppendUint32(b, version)
	return binary.LittleEndian.AppendUint32(b, uint32(from))
}

func decodeHello(b []byte) (from topo.Rank, err error) {
	if len(b) != helloBytes {
		return 0, fmt.Errorf("got a hello of %d bytes, want %d", len(b), helloBytes)
	}
	if m, v := binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:]); m != magic || v != version {
		return 0, fmt.Errorf("got a hello with magic %#08x and version %d, want magic %#08x and version %d",
			m, v,
			uint32(magic), version)
	}
	return topo.Rank(binary.LittleEndian.Uint32(b[8:])), nil
}

// proofOf returns the key and the purpose of the proof by which a dialer and an acceptor authenticate each
// other. dials is the offer of the dialer, and accepts is the offer of the acceptor.
func proofOf(ep *Epoch, dialer, acceptor topo.Rank, dials,
	accepts *Offer) (key secret.Secret, purpose string, err error) {
	key, err = secret.Parse(hex.EncodeToString(slices.Concat(dials.Token, accepts.Token)))
	return key, fmt.Sprintf("shm epoch %d rank %d to %d %s", ep.Epoch, dialer, acceptor, ep.Job), err
}

// dialHandshake does the handshake on the side of the dialer.
func dialHandshake(c *net.UnixConn, ep *Epoch, own *Offer, to topo.Rank) error {
	if err := dial.CheckUser(c); err != nil {
		return err
	}
	key, purpose, err := proofOf(ep, ep.Rank, to, own, &ep.Offers[to])
	if err != nil {
		return err
	}
	if _, err := c.Write(encodeHello(ep.Rank)); err != nil {
		return err
	}
	_, err = key.Dial(&packets{UnixConn: c}, purpose)
	return err
}

// acceptHandshake does the handshake on the side of the acceptor. Only the rank leader may connect.
func acceptHandshake(c *net.UnixConn, ep *Epoch, own *Offer, leader topo.Rank) error {
	if err := dial.CheckUser(c); err != nil {
		return err
	}
	var b [maxPacketBytes]byte
	n, err := c.Read(b[:])
	if err != nil {
		return err
	}
	from, err := decodeHello(b[:n])
	if err != nil {
		return err
	}
	if from != leader {
		return fmt.Errorf("got a connection from rank %d, but only rank %d may connect, the lowest rank of this host",
			from, leader)
	}
	key, purpose, err := proofOf(ep, from, ep.Rank, &ep.Offers[from], own)
	if err == nil {
		_, err = key.Accept(&packets{UnixConn: c}, purpose)
	}
	return err
}

// packets is a connection that carries packets. Read returns the bytes of the packets as a stream.
type packets struct {
	*net.UnixConn
	packet [maxPacketBytes]byte
	unread []byte
}

func (p *packets) Read(b []byte) (int, error) {
	if len(p.unread) == 0 {
		n, err := p.UnixConn.Read(p.packet[:])
		if err != nil {
			return 0, err
		}
		p.unread = p.packet[:n]
	}
	n := copy(b, p.unread)
	p.unread = p.unread[n:]
	return n, nil
}
