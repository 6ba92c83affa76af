package c10d

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/store"
)

// Numbers are little-endian. A string or a value is encoded as its length (u64) and its bytes. A list is
// encoded as the number of its elements (u64) and the elements.

// opcode is an operation of the protocol. Its value is the number of the operation in PyTorch 2.2 and later.
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
	opListKeys // since PyTorch 2.15
	opWatch    // only old clients send it
	numOps
)

var opNames = [numOps]string{
	"validate", "set", "compare_set", "get", "add", "check", "wait", "num_keys", "delete_key", "append",
	"multi_get",
	"multi_set", "cancel_wait", "ping", "queue_push", "queue_pop", "queue_len", "list_keys",
	"watch_key",
}

func (o opcode) String() string {
	if o >= numOps {
		return fmt.Sprintf("opcode(%d)", uint8(o))
	}
	return opNames[o]
}

// magic is the number with which a client validates itself.
const magic = 0x3C85F7CE

// Answers that consist of one byte.
const (
	checkReady    = 0
	checkNotReady = 1
	waitStopped   = 0
	waitCanceled  = 1
)

// Dialect is a range of PyTorch versions that use the same numbers for operations.
type Dialect uint8

const (
	// Unknown means that Dial detects the dialect.
	Unknown Dialect = iota
	// Modern is the dialect of PyTorch 2.2 and later.
	Modern
	// Torch21 is the dialect of PyTorch 2.1.
	Torch21
	// Old is the dialect of PyTorch before 2.1.
	Old
)

func (d Dialect) String() string {
	return [...]string{"any PyTorch", "PyTorch 2.2 and later", "PyTorch 2.1", "PyTorch before 2.1"}[d]
}

// ops has the operations of each dialect. The index of an operation in its list is its number in the dialect.
var ops = [...][]opcode{
	Modern: {
		opValidate, opSet, opCompareSet, opGet, opAdd, opCheck, opWait, opNumKeys, opDelete, opAppend,
		opMultiGet, opMultiSet,
		opCancelWait, opPing, opQueuePush, opQueuePop, opQueueLen, opListKeys,
	},
	Old: {opSet, opCompareSet, opGet, opAdd, opCheck, opWait, opNumKeys, opWatch, opDelete},
	Torch21: {opSet, opCompareSet, opGet, opAdd, opCheck, opWait, opNumKeys, opDelete, opAppend, opMultiGet,
		opMultiSet, opCancelWait},
}

// is21 reports whether the operation number of an old client shows that the client is PyTorch 2.1. Numbers up
// to 8 do not show it, because earlier versions use them too.
func is21(number uint8) bool { return number > 8 }

// reader reads the fields of requests and answers, and limits their lengths.
type reader struct {
	*bufio.Reader
	scratch []byte
	// hold is called before the next part of a request is read, with the number of bytes of memory that it
	// takes and the most that the parts after it can take. It returns an error if the request must not take
	// them. It is nil in a client.
	hold func(numBytes, rest int) error
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

// bytes reads a value. The result is valid until the next read. The parts of the request after this one take
// at most rest bytes.
func (r *reader) bytes(most, rest int) ([]byte, error) {
	n, err := r.u64()
	if err != nil {
		return nil, err
	}
	if n > uint64(most) {
		return nil, fmt.Errorf("got %d bytes, want at most %d", n, most)
	}
	if r.hold != nil {
		if err := r.hold(elementBytes+int(n), rest); err != nil {
			return nil, err
		}
	}
	b, err := dial.ReadBytes(r, r.scratch, int(n))
	if err == nil && cap(b) <= keptBytes {
		r.scratch = b
	}
	return b, err
}

const (
	// keptBytes is the maximum size of a buffer that a connection keeps for its next value.
	keptBytes = 4 << 10
	// elementBytes is the memory for an element of a list besides its bytes.
	elementBytes = 48
	// mostKey and mostValue are the most memory that a key or a value takes.
	mostKey, mostValue = elementBytes + store.MaxKeyBytes, elementBytes + store.MaxValueBytes
)

// value reads a value. The caller may keep the result.
func (r *reader) value(rest int) ([]byte, error) {
	b, err := r.bytes(store.MaxValueBytes, rest)
	return append([]byte{}, b...), err
}

func (r *reader) key(rest int) (string, error) {
	b, err := r.bytes(store.MaxKeyBytes, rest)
	return string(b), err
}

// length reads the number of elements of a list.
func (r *reader) length() (int, error) {
	n, err := r.u64()
	if err == nil && n > store.MaxKeys {
		err = fmt.Errorf("got a list of %d elements, want at most %d", n, store.MaxKeys)
	}
	return int(n), err
}

func (r *reader) keys() (keys []string, err error) {
	n, err := r.length()
	for i := range n {
		if err != nil {
			return nil, err
		}
		var k string
		k, err = r.key((n - 1 - i) * mostKey)
		keys = append(keys, k)
	}
	return keys, err
}

// unexpected returns io.ErrUnexpectedEOF if err is io.EOF, because the stream has ended in the middle of a
// request. Otherwise it returns err.
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
