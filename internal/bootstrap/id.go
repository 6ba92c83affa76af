package bootstrap

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/store"
)

// ID is the unique id of a job. It contains the address of a store that one process serves for the job, and
// the job's key. Anybody who has the id can join the job, so treat it as a secret: pass the result of String
// to the ranks, but do not log it.
//
//	0    magic "GHVI", version u32
//	8    key [32]
//	40   family u8 (4 or 6), flags u8 (1: connections are encrypted), port u16, address [16]; IPv4 is in the first four bytes
//	60   zeros
//	120  checksum: the first eight bytes of the SHA-256 of bytes 0 to 119     (numbers big-endian)
type ID [128]byte

const (
	idMagic   = "GHVI"
	idVersion = 2
	idKey     = 8
	idAddr    = 40
	idFlags   = 41
	idSum     = 120
	keyBytes  = 32

	flagEncrypt = 1
)

// idText is the encoding of ids as text. It is strict, so that each id has only one valid text.
var idText = base64.RawURLEncoding.Strict()

// newID makes an id from the address of a store and a key.
func newID(addr netip.AddrPort, key [keyBytes]byte, encrypt bool) (ID, error) {
	ip := addr.Addr().Unmap()
	switch {
	case !ip.IsValid() || ip.IsUnspecified() || addr.Port() == 0:
		return ID{}, fmt.Errorf(
			"unique id: its store cannot listen on %s, want an address that other ranks can dial", addr)
	case ip.Zone() != "":
		return ID{}, fmt.Errorf(
			"unique id: its store cannot listen on %s, want an address without a zone, because zones differ between hosts", addr)
	}
	var id ID
	copy(id[:], idMagic)
	binary.BigEndian.PutUint32(id[4:], idVersion)
	copy(id[idKey:], key[:])
	id[idAddr] = 6
	if ip.Is4() {
		id[idAddr] = 4
	}
	if encrypt {
		id[idFlags] = flagEncrypt
	}
	binary.BigEndian.PutUint16(id[idAddr+2:], addr.Port())
	copy(id[idAddr+4:], ip.AsSlice())
	id.seal()
	return id, nil
}

func (id *ID) seal() {
	sum := sha256.Sum256(id[:idSum])
	copy(id[idSum:], sum[:])
}

// String returns the id as text: 171 letters, digits, '-' and '_'.
func (id ID) String() string { return idText.EncodeToString(id[:]) }

// ParseID parses the text of an id. It ignores white space around it. Its error does not contain the text,
// which is a secret.
func ParseID(text string) (ID, error) {
	text = strings.TrimSpace(text)
	if want := idText.EncodedLen(len(ID{})); len(text) != want {
		return ID{}, fmt.Errorf("bootstrap: parse id: got %d characters, want %d", len(text), want)
	}
	b, err := idText.DecodeString(text)
	// DecodeString ignores line breaks, so a text of the right length may decode to too few bytes.
	if err != nil || len(b) != len(ID{}) {
		return ID{}, errors.New("bootstrap: parse id: the text is not base64")
	}
	id := ID(b)
	if _, err := id.open(); err != nil {
		return ID{}, fmt.Errorf("bootstrap: parse id: %w", err)
	}
	return id, nil
}

// idStore describes the store to which an id refers.
type idStore struct {
	addr    string        // host:port
	key     secret.Secret // secret of the job; it encrypts connections if the id has the flag for that
	encrypt bool
}

func (id *ID) open() (idStore, error) {
	sum := sha256.Sum256(id[:idSum])
	version := binary.BigEndian.Uint32(id[4:])
	switch {
	case string(id[:4]) != idMagic:
		return idStore{}, errors.New("the text is not a unique id: its magic number is missing")
	case version != idVersion:
		return idStore{}, fmt.Errorf("the version of the id is %d, want %d", version, idVersion)
	case !bytes.Equal(id[idSum:], sum[:len(id)-idSum]):
		return idStore{}, errors.New("the checksum is wrong, so the id is damaged")
	}
	var zeros [idSum]byte
	var ip netip.Addr
	used := idAddr + 4 + 16
	switch id[idAddr] {
	case 4:
		used = idAddr + 4 + 4
		ip = netip.AddrFrom4([4]byte(id[idAddr+4:]))
	case 6:
		ip = netip.AddrFrom16([16]byte(id[idAddr+4:]))
	default:
		return idStore{}, fmt.Errorf("the address family is %d, want 4 or 6", id[idAddr])
	}
	port := binary.BigEndian.Uint16(id[idAddr+2:])
	switch {
	case ip.IsUnspecified() || ip.Is4In6() || port == 0:
		return idStore{}, fmt.Errorf("the address is %s port %d, want an address and a port that can be dialed", ip, port)
	case id[idFlags]&^flagEncrypt != 0 || !bytes.Equal(id[used:idSum], zeros[used:]):
		return idStore{}, errors.New("the reserved bytes are not zero")
	}
	encrypt := id[idFlags] == flagEncrypt
	key, err := secretOf([keyBytes]byte(id[idKey:]), encrypt)
	return idStore{netip.AddrPortFrom(ip, port).String(), key, encrypt}, err
}

func secretOf(key [keyBytes]byte, encrypt bool) (secret.Secret, error) {
	s, err := secret.Parse(hex.EncodeToString(key[:]))
	if encrypt {
		s = s.Encrypted()
	}
	return s, err
}

// metKey is the key that rank 0 sets in the store of an id when all ranks have met.
const metKey = "gohvd/met"

// lateTime is how long the store of an id is still served after all ranks have met. A process that comes too
// late connects in this time and gets an error that says so.
const lateTime = 30 * time.Second

// NewID serves a store for the ranks of one job, on a free port of listenHost, and returns the id by which
// the ranks find the store. The store is served until 30 s after all ranks have met, or until ctx ends. Then
// the channel served is closed.
func NewID(ctx context.Context, listenHost string, encrypt bool,
	log *zap.Logger) (id ID, served <-chan struct{}, err error) {
	if id, served, err = serveID(ctx, listenHost, encrypt, log, lateTime); err != nil {
		err = fmt.Errorf("bootstrap: new id: %w", err)
	}
	return id, served, err
}

func serveID(ctx context.Context, listenHost string, encrypt bool, log *zap.Logger,
	late time.Duration) (id ID, served <-chan struct{}, err error) {
	if err := ctx.Err(); err != nil {
		return ID{}, nil, err
	}
	var key [keyBytes]byte
	rand.Read(key[:]) // rand.Read never fails
	proof, err := secretOf(key, encrypt)
	if err != nil {
		return ID{}, nil, err
	}
	kv := store.NewHashStore(store.Limits{})
	server, err := store.Serve(net.JoinHostPort(listenHost, "0"), kv, store.Config{Secret: proof, Log: log})
	if err != nil {
		return ID{}, nil, errors.Join(err, kv.Close())
	}
	stop := func() error { return errors.Join(server.Close(), kv.Close()) }
	addr, err := netip.ParseAddrPort(server.Addr())
	if err == nil {
		id, err = newID(addr, key, encrypt)
	}
	if err != nil {
		return ID{}, nil, errors.Join(err, stop())
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if kv.Wait(ctx, metKey) == nil {
			dial.Pause(ctx, late, nil)
		}
		if err := stop(); err != nil && log != nil {
			log.Warn("bootstrap: closing the store of a unique id failed", zap.Error(err))
		}
	}()
	return id, done, nil
}

// OpenIDs connects to the store of a job by one or several ids. All ranks must pass the same ids in the same
// order. With one id, all ranks use the same store. With several ids, each id has its own store in a process
// of its own, and each rank uses one of the stores. Rank 0 uses the store of the first id. It publishes the
// address of its root in all stores.
func OpenIDs(ctx context.Context, ids []ID, rank, size int) (*Place, error) {
	if len(ids) < 1 || len(ids) > max(size, 1) {
		return nil, fmt.Errorf("bootstrap: got %d ids, want 1 to %d, at most one per rank", len(ids), size)
	}
	stores, names := make([]idStore, len(ids)), sha256.New()
	for i, id := range ids {
		s, err := id.open()
		if err != nil {
			return nil, fmt.Errorf("bootstrap: id %d: %w", i, err)
		}
		if first := slices.Index(ids, id); first < i {
			return nil, fmt.Errorf("bootstrap: ids %d and %d are the same", first, i)
		}
		stores[i] = s
		if s.encrypt != stores[0].encrypt {
			return nil, fmt.Errorf(
				"bootstrap: only one of ids 0 and %d is for encrypted connections, want both or neither", i)
		}
		names.Write(id[:])
	}
	first := sha256.Sum256(ids[0][:])
	p := &Place{
		Rank: rank, Size: size, Secret: stores[0].key, JobID: "id-" + hex.EncodeToString(first[:8]),
		Terms: map[string]string{"the list of unique ids": hex.EncodeToString(names.Sum(nil)[:8])},
	}
	if rank != 0 {
		// If rank is out of range, this process connects to the first store, so that Join can report the
		// error to the other ranks.
		own := 0
		if rank > 0 && rank < size {
			own = rank * len(ids) / size
		}
		stores = stores[own : own+1]
	}
	if err := p.dialIDs(ctx, stores); err != nil {
		return nil, err
	}
	return p, nil
}

// dialIDs connects to the given stores and sets p.Store and p.Addr.
func (p *Place) dialIDs(ctx context.Context, stores []idStore) error {
	var all spread
	for _, s := range stores {
		client, err := store.Dial(ctx, s.addr, store.Config{Secret: s.key})
		if err != nil {
			return errors.Join(fmt.Errorf("bootstrap: connecting to the process that made the id: %w", err),
				p.Close())
		}
		p.onClose(client.Close)
		all = append(all, client)
	}
	p.Addr, p.Store = stores[0].addr, all[0]
	if len(all) > 1 {
		p.Store = rootSpreader{all[0], all[1:]}
	}
	if p.Rank == 0 {
		p.onMet(func(ctx context.Context) error { return all.set(ctx, metKey, nil) })
	}
	return nil
}

// spread holds the stores of all ids of a job, in the order of the ids.
type spread []store.Store

func (s spread) set(ctx context.Context, key string, value []byte) error {
	var errs []error
	for _, kv := range s {
		errs = append(errs, kv.Set(ctx, key, value))
	}
	return errors.Join(errs...)
}

// rootSpreader is the store that rank 0 uses if there are several ids: the store of the first id. When rank 0
// publishes the address of its root there, rootSpreader copies the address to the stores of the other ids.
type rootSpreader struct {
	store.Store
	others spread
}

func (s rootSpreader) CompareAndSet(ctx context.Context, key string, expected,
	desired []byte) (actual []byte, swapped bool, err error) {
	actual, swapped, err = s.Store.CompareAndSet(ctx, key, expected, desired)
	if err == nil && swapped {
		err = s.others.set(ctx, key, desired)
	}
	return actual, swapped, err
}
