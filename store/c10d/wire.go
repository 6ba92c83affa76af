package c10d

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/store"
)

// Numbers are little-endian, strings and values a u64 length and bytes, lists a u64 count and their elements.

// opcode is an operation, numbered as since PyTorch 2.2.
type opcode uint8

const (
	opValidate opcode = iota
	opSet
	opCompareSet
	opGet
	opAdd
	opCheck
	opWait
	opNumKeys
	opDelete
	opAppend
	opMultiGet
	opMultiSet
	opCancelWait
	opPing
	opQueuePush
	opQueuePop
	opQueueLen
	opWatch // sent by old clients only
	numOps
)

var opNames = [numOps]string{
	"validate", "set", "compare_set", "get", "add", "check", "wait", "num_keys", "delete_key", "append",
	"multi_get",
	"multi_set", "cancel_wait", "ping", "queue_push", "queue_pop", "queue_len", "watch_key",
}

func (o opcode) String() string {
	if o >= numOps {
		return fmt.Sprintf("opcode(%d)", uint8(o))
	}
	return opNames[o]
}

// magic validates a client.
const magic = 0x3C85F7CE

// Answers of one byte.
const (
	checkReady    = 0
	checkNotReady = 1
	waitStopped   = 0
	waitCanceled  = 1
)

// Dialect is the numbering of operations in a range of PyTorch's versions.
type Dialect uint8

const (
	// Unknown means that Dial detects the dialect.
	Unknown Dialect = iota
	// Modern is that of PyTorch 2.2 and later.
	Modern
	// Torch21 is that of PyTorch 2.1.
	Torch21
	// Old is that of all versions before.
	Old
)

func (d Dialect) String() string {
	return [...]string{"any PyTorch", "PyTorch 2.2 and later", "PyTorch 2.1", "PyTorch before 2.1"}[d]
}

// ops are the operations of a dialect by their numbers there.
var ops = [...][]opcode{
	Modern: {
		opValidate, opSet, opCompareSet, opGet, opAdd, opCheck, opWait, opNumKeys, opDelete, opAppend,
		opMultiGet, opMultiSet,
		opCancelWait, opPing, opQueuePush, opQueuePop, opQueueLen,
	},
	Old: {opSet, opCompareSet, opGet, opAdd, opCheck, opWait, opNumKeys, opWatch, opDelete},
	Torch21: {opSet, opCompareSet, opGet, opAdd, opCheck, opWait, opNumKeys, opDelete, opAppend, opMultiGet,
		opMultiSet, opCancelWait},
}

// is21 reports whether a number that an old client sends shows that it is of 2.1. Number 7 does not: before
// 2.1 it is watch_key, in 2.1 delete_key.
func is21(number uint8) bool { return number > 8 }

// reader reads requests, or answers, with bounds on their lengths.
type reader struct {
	*bufio.Reader
	scratch []byte
}

func (r *reader) u32() (uint32, error) {
	var b [4]byte
	_, err := io.ReadFull(r, b[:])
	return binary.LittleEndian.Uint32(b[:]), unexpected(err)
}

func (r *reader) u64() (uint64, error) {
	var b [8]byte
	_, err := io.ReadFull(r, b[:])
	return binary.LittleEndian.Uint64(b[:]), unexpected(err)
}

// bytes reads a value, which is valid until the next read.
func (r *reader) bytes(most int) ([]byte, error) {
	n, err := r.u64()
	if err != nil {
		return nil, err
	}
	if n > uint64(most) {
		return nil, fmt.Errorf("got %d bytes, want at most %d", n, most)
	}
	b, err := dial.ReadBytes(r, r.scratch, int(n))
	if err == nil && cap(b) <= keptBytes {
		r.scratch = b
	}
	return b, err
}

// keptBytes bounds the buffer that a connection keeps for its next value.
const keptBytes = 64 << 10

// value reads a value that the caller keeps.
func (r *reader) value() ([]byte, error) {
	b, err := r.bytes(store.MaxValueBytes)
	return append([]byte{}, b...), err
}

func (r *reader) key() (string, error) {
	b, err := r.bytes(store.MaxKeyBytes)
	return string(b), err
}

// count reads the length of a list.
func (r *reader) count() (int, error) {
	n, err := r.u64()
	if err == nil && n > store.MaxKeys {
		err = fmt.Errorf("got a list of %d elements, want at most %d", n, store.MaxKeys)
	}
	return int(n), err
}

func (r *reader) keys() (keys []string, err error) {
	n, err := r.count()
	for range n {
		if err != nil {
			return nil, err
		}
		var k string
		k, err = r.key()
		keys = append(keys, k)
	}
	return keys, err
}

// unexpected returns err, or io.ErrUnexpectedEOF for an end in the middle of a request.
func unexpected(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

func appendU32(b []byte, v uint32) []byte { return binary.LittleEndian.AppendUint32(b, v) }

func appendU64(b []byte, v uint64) []byte { return binary.LittleEndian.AppendUint64(b, v) }

func appendBytes[T ~string | ~[]byte](b []byte, v T) []byte {
	return append(appendU64(b, uint64(len(v))), v...)
}

func appendKeys(b []byte, keys []string) []byte {
	b = appendU64(b, uint64(len(keys)))
	for _, k := range keys {
		b = appendBytes(b, k)
	}
	return b
}
