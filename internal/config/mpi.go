//go:build mpi

package config

// BuiltMPI says whether this program was built with MPI.
const BuiltMPI = true
