package bootstrap

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/gohvd/gohvd/secret"
)

// ID is where a root is and the key that it wants proven. Who has it can join the job, so it is to be kept as a secret is:
// String is for handing it round, not for logs.
//
//	0    magic "GHVI", version u32
//	8    key [32]
//	40   family u8 (4 or 6), flags u8 (1: connections are encrypted), port u16, address [16]; IPv4 is in the first four bytes
//	60   number of roots u32, 1
//	64   zeros
//	120  checksum: the first eight bytes of the SHA-256 of what is before     (numbers big-endian)
type ID [128]byte

const (
	idMagic    = "GHVI"
	idVersion  = 1
	idKey      = 8
	idAddr     = 40
	idFlags    = 41
	idRoots    = 60
	idReserved = 64
	idSum      = 120
	keyBytes   = 32

	flagEncrypt = 1
)

// idText is strict, so that one id has one text.
var idText = base64.RawURLEncoding.Strict()

// newID makes an id with key for a root at addr.
func newID(addr netip.AddrPort, key [keyBytes]byte, encrypt bool) (ID, error) {
	ip := addr.Addr().Unmap()
	switch {
	case !ip.IsValid() || ip.IsUnspecified() || addr.Port() == 0:
		return ID{}, fmt.Errorf("root listens on %s, want an address that other ranks can dial", addr)
	case ip.Zone() != "":
		return ID{}, fmt.Errorf("root listens on %s, want an address without a zone: other hosts have other zones", addr)
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
	binary.BigEndian.PutUint32(id[idRoots:], 1)
	id.seal()
	return id, nil
}

func (id *ID) seal() {
	sum := sha256.Sum256(id[:idSum])
	copy(id[idSum:], sum[:])
}

// String is the text of id, 171 letters, digits, '-' and '_'.
func (id ID) String() string { return idText.EncodeToString(id[:]) }

// ParseID is the id of a text that String made, with white space around it or not. Its error does not show the text.
func ParseID(text string) (ID, error) {
	text = strings.TrimSpace(text)
	if want := idText.EncodedLen(len(ID{})); len(text) != want {
		return ID{}, fmt.Errorf("bootstrap: parse id: %d characters, want %d", len(text), want)
	}
	b, err := idText.DecodeString(text)
	if err != nil || len(b) != len(ID{}) { // shorter if line breaks, which base64 skips, stand in the text
		return ID{}, errors.New("bootstrap: parse id: not base64")
	}
	id := ID(b)
	if _, err := id.open(); err != nil {
		return ID{}, fmt.Errorf("bootstrap: parse id: %w", err)
	}
	return id, nil
}

// meeting is what an id says: where, and with which key.
type meeting struct {
	addr    string        // host:port
	key     secret.Secret // encrypted if encrypt is set
	encrypt bool
}

func (id *ID) open() (meeting, error) {
	sum := sha256.Sum256(id[:idSum])
	version, roots := binary.BigEndian.Uint32(id[4:]), binary.BigEndian.Uint32(id[idRoots:])
	switch {
	case string(id[:4]) != idMagic:
		return meeting{}, errors.New("no id: it begins with something else")
	case version != idVersion:
		return meeting{}, fmt.Errorf("version is %d, want %d", version, idVersion)
	case !bytes.Equal(id[idSum:], sum[:len(id)-idSum]):
		return meeting{}, errors.New("checksum is wrong: the id was damaged")
	case roots != 1:
		return meeting{}, fmt.Errorf("id has %d roots, want 1", roots)
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
		return meeting{}, fmt.Errorf("address family is %d, want 4 or 6", id[idAddr])
	}
	port := binary.BigEndian.Uint16(id[idAddr+2:])
	switch {
	case ip.IsUnspecified() || ip.Is4In6() || port == 0:
		return meeting{}, fmt.Errorf("address is %s port %d, want one that can be dialed", ip, port)
	case id[idFlags]&^flagEncrypt != 0 || !bytes.Equal(id[used:idRoots], zeros[used:idRoots]) ||
		!bytes.Equal(id[idReserved:idSum], zeros[idReserved:]):
		return meeting{}, errors.New("bytes that must be zero are not")
	}
	encrypt := id[idFlags] == flagEncrypt
	key, err := secretOf([keyBytes]byte(id[idKey:]), encrypt)
	return meeting{netip.AddrPortFrom(ip, port).String(), key, encrypt}, err
}

// meetings opens ids. list names them in their order and shows nothing of their keys; ring is the key of the ring, which
// takes all of them to know, and is encrypted if they are.
func meetings(ids []ID) (all []meeting, list [sha256.Size]byte, ring secret.Secret, err error) {
	names, keys := sha256.New(), sha256.New()
	names.Write([]byte("gohvd bootstrap ids\x00"))
	keys.Write([]byte("gohvd bootstrap ring\x00"))
	seen := make(map[ID]int, len(ids))
	for i, id := range ids {
		m, err := id.open()
		if err != nil {
			return nil, list, ring, fmt.Errorf("id %d: %w", i, err)
		}
		if first, ok := seen[id]; ok {
			return nil, list, ring, fmt.Errorf("ids %d and %d are the same", first, i)
		}
		seen[id] = i
		all = append(all, m)
		if m.encrypt != all[0].encrypt {
			return nil, list, ring, fmt.Errorf("of ids 0 and %d one is for encrypted connections: want both or neither", i)
		}
		names.Write(id[:])
		keys.Write(id[:])
	}
	ring, err = secretOf([keyBytes]byte(keys.Sum(nil)), len(all) > 0 && all[0].encrypt)
	return all, [sha256.Size]byte(names.Sum(nil)), ring, err
}

func secretOf(key [keyBytes]byte, encrypt bool) (secret.Secret, error) {
	s, err := secret.Parse(hex.EncodeToString(key[:]))
	if encrypt {
		s = s.Encrypted()
	}
	return s, err
}
