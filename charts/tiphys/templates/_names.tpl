{{/* Names, labels and the image: what every object of the chart is called by. */}}

{{- define "tiphys.labels" -}}
app.kubernetes.io/name: tiphys
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: tiphys
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Selectors never change: those of a Deployment cannot. Takes a dict of root and component. */}}
{{- define "tiphys.selector" -}}
app.kubernetes.io/name: tiphys
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "tiphys.image" -}}
{{- $image := .Values.image -}}
{{- if $image.digest -}}
{{ printf "%s@%s" $image.repository $image.digest }}
{{- else -}}
{{ printf "%s:%s" $image.repository ($image.tag | default .Chart.AppVersion) }}
{{- end -}}
{{- end }}

{{/* Names of objects that belong to no namespace: two releases of one name may live in two namespaces. */}}
{{- define "tiphys.clusterName" -}}
{{ .root.Release.Namespace }}-{{ .root.Release.Name }}-{{ .component }}
{{- end }}

{{/* Workflow namespaces, as a JSON list. */}}
{{- define "tiphys.namespaces" -}}
{{- .Values.namespaces | default (list .Release.Namespace) | uniq | sortAlpha | toJson -}}
{{- end }}

{{/* Secret with the certificate of service and controller; empty without TLS. */}}
{{- define "tiphys.tlsSecret" -}}
{{- if .Values.tls.issuerRef.name -}}
{{ .Values.tls.secret | default (printf "%s-tls" .Release.Name) }}
{{- else -}}
{{ .Values.tls.secret }}
{{- end -}}
{{- end }}

{{- define "tiphys.scheme" -}}
{{ if include "tiphys.tlsSecret" . }}https{{ else }}http{{ end }}
{{- end }}

{{- define "tiphys.serviceUrl" -}}
{{ include "tiphys.scheme" . }}://{{ .Release.Name }}-plugin.{{ .Release.Namespace }}.svc:7243
{{- end }}

{{/* Arguments that service, agent and controller share, as a JSON list. */}}
{{- define "tiphys.serviceArgs" -}}
{{- $args := list (printf "--store=%s" .Values.store.url) -}}
{{- if .Values.clusterWide -}}
{{- $args = append $args "--all-namespaces" -}}
{{- else -}}
{{- range include "tiphys.namespaces" . | fromJsonArray -}}
{{- $args = append $args (printf "--namespace=%s" .) -}}
{{- end -}}
{{- end -}}
{{- if include "tiphys.tlsSecret" . -}}
{{- $args = concat $args (list "--tls-cert=/etc/tiphys/tls/tls.crt" "--tls-key=/etc/tiphys/tls/tls.key") -}}
{{- end -}}
{{- $args | toJson -}}
{{- end }}

{{/* Link of an alert to its page in docs/runbooks.md. Takes a dict of root and alert. */}}
{{- define "tiphys.runbook" -}}
{{- with .root.Values.prometheusRule.runbooks }}
            runbook_url: {{ printf "%s#%s" . (lower $.alert) }}
{{- end }}
{{- end }}
