package store

const MaxClients = maxClients
